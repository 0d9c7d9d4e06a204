"""Other published prunings, one file each, for comparison. train.py needs none of them.

May import: everything but integrations and tests; from bench only what writes rows. Nothing but
bench and tests imports it; the root finds rivals by name.
"""
