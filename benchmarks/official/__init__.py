"""The releases' own code beside ours: same weights, same process, same threads, in turn.

    python -m benchmarks.official --var FOLDER --code FOLDER --llamagen FOLDER --mar FOLDER \\
        --lantern FOLDER

The folders are clones of the releases, fetched by the user. Nothing of theirs is copied into this
repository; what keeps them from running on a CPU beside one another is set aside while they run
(:mod:`benchmarks.official.releases`). On a machine that does other things, too, set
``OMP_WAIT_POLICY=PASSIVE``: threads that spin while they wait for one another take the time that
those need.
"""
