"""The demo in a browser: pictures, questions and text, plain and accelerated, on models that are
already here.

``page`` lays it out, ``drawing`` and ``writing`` stream what the models make, ``measuring`` races
methods, ``models`` keeps pipelines. Nothing is fetched from or sent to anywhere unless the user
asks for it on the command line.
"""
