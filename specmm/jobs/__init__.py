"""Batch jobs: many pictures or answers from a list, exactly once each, however often the process
dies.

``items`` reads the list, ``engines`` runs a job: ``run`` is the loop, which hands items to makers
(``making`` in this process, ``cluster`` on Ray), who use a pipeline (``workers``, ``answers``).
``results`` writes files, ``journal`` records the outcome of items, ``folder`` and ``programs`` hold
the job's initial settings; ``finish`` writes the index and archives, ``verify`` checks.
"""
