"""Batch jobs: many pictures or answers from a list, exactly once each, however often the process
dies.

``items`` reads the list, ``workers`` runs a pipeline over some of it, ``journal`` remembers what is
done, ``store`` writes pictures and answers, ``run`` is the loop, ``engines`` spreads it over
processes, ``finish`` makes index and archives of a finished job, ``verify`` checks an output
folder.
"""
