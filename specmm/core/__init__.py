"""The draft-verify core: trees, the KV cache, protocols of target and drafter, and the loop."""
