"""The demo in a browser: pictures, questions and text, plain and accelerated, on local models.

``page`` has the layout, ``streams`` shows what the models make as they make it, ``models`` keeps
pipelines. Nothing is downloaded or sent unless the user asks for it on the command line.
"""
