"""Code that the command line, jobs and the app share; nothing here prints or parses options.

``run`` opens a model and a method by name and draws pictures, ``race`` runs methods side by side,
``plans`` reports the planners' measurements, ``figures`` draws tables and plots about runs.
"""
