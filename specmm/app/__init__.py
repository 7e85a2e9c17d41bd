"""The demo in a browser: pictures, questions and text, plain and accelerated, on local models.

``page`` has the layout, ``lanes`` run the two methods of a race, ``models`` holds the pipelines.
Nothing is downloaded or sent unless the user asks for it on the command line.
"""
