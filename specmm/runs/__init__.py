"""What the command line, jobs and the app share; nothing here prints or knows of options.

``models`` opens a model of any family where it is to run, ``method_names`` reads methods from text,
``pictures`` draws and saves, ``answers`` says what a call gave, ``race`` runs methods side by side,
``comparison_page`` shows them.
"""
