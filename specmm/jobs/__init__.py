"""Batch jobs: many pictures or answers from a list, exactly once each, however often the process
dies.

``items`` reads the list, ``workers`` runs a pipeline over some of it, ``folder`` stores the job's
specification, journals and results, ``run`` is the loop, ``engines`` spreads it over processes,
``finish`` writes index and archives of a finished job, ``verify`` checks an output folder.
"""
