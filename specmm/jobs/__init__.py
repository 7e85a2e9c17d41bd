"""Batch jobs: many pictures or answers from a list, exactly once each, however often the process
dies.

``items`` reads the list, ``workers`` runs a pipeline over some of it, ``folder`` keeps what a job
is, its journals and its results, ``run`` is the loop, ``engines`` spreads it over processes,
``finish`` writes index and archives of a finished job, ``verify`` checks an output folder.
"""
