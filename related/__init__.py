"""Other published prunings, one file each, for comparison. train.py needs none of them.

May import: related, the root, engines, tasks and runtime. Nothing but bench and tests imports it;
the root finds rivals by name.
"""
