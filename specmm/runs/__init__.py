"""What the command line, jobs and the app share; nothing here prints or knows of options.

``run`` opens a model and a method by name and draws pictures, ``race`` runs methods side by side,
``plans`` says what the planners measure here, ``figures`` draws pages and plots about runs.
"""
