"""What the tables of the report show: columns by name, and their headings."""

SPEED = {
    "method": "method",
    "dtype": "dtype",
    "seconds": "s / picture",
    "speedup": "speed-up",
    "speedup_low": "lower quartile",
    "speedup_high": "upper quartile",
    "tau": "τ",
    "draft_ms": "draft, ms / round",
    "verify_ms": "verify, ms / round",
    "host_overhead": "host share",
    "ideal": "ideal",
    "loop_speedup": "token loop",
    "realised": "realised / ideal",
    "certificate": "certificate",
    "tv": "TV / token",
    "log_likelihood": "log p / token",
}
QUALITY = {
    "method": "method",
    "samples": "samples",
    "fid": "FID",
    "fid_ratio": "FID / plain",
    "kid": "KID",
    "kid_ratio": "KID / plain",
    "log_likelihood": "log p / token",
    "tau": "τ",
    "tv": "TV / token",
    "certificate": "certificate",
    "nearest_train": "nearest training picture",
    "closer_than_test": "closer than test's median",
}
ABOUT_AUTO = (
    "model temperature batch best best_over_plain auto_over_plain median worst first "
    "later_median later_worst later_first taken"
)
AUTO = {name: name.replace("_", " ") for name in ABOUT_AUTO.split(" ")}
SETTING = {
    "method": "setting",
    "batch": "batch",
    "seconds": "s / picture",
    "speedup": "speed-up",
    "speedup_low": "lower quartile",
    "speedup_high": "upper quartile",
}
SAMPLED = {
    "samples": "samples",
    "fid": "FID",
    "fid_ratio": "FID / plain",
    "kid": "KID",
    "certificate": "certificate",
}
MAR = {
    **SETTING,
    "target_passes": "target passes",
    "head_calls_per_token": "head calls / token",
    "acceptance": "acceptance",
    **SAMPLED,
    "front": "on the front",
}
VAR = {
    **SETTING,
    "predicted": "predicted s",
    "peak_mib": "peak, MiB",
    "ideal": "ideal",
    "realised": "realised / ideal",
    **SAMPLED,
}
LANGUAGE = {
    "questions": "what",
    "temperature": "T",
    "batch": "batch",
    "method": "method",
    "ms_a_token": "ms / token",
    "speedup": "speed-up",
    "speedup_low": "lower quartile",
    "speedup_high": "upper quartile",
    "tau": "τ",
    "token_equal": "token-equal",
    "certificate": "certificate",
}
TEXT = {**LANGUAGE, "search_share": "search"}
