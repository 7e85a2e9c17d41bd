"""Batch jobs: many pictures or answers from a list, exactly once each, however often the process
dies.

``items`` reads the list, ``engines`` runs a job: ``run`` is the loop, which hands items to those
who make them (``making`` in this process, ``cluster`` on Ray) by a pipeline (``workers``,
``answers``). ``results`` writes files, ``journal`` what became of items, ``folder`` and
``programs`` what the job began with; ``finish`` writes the index and archives, ``verify`` checks.
"""
