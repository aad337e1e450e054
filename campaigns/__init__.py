"""Campaigns of faults: long random runs against a part of the library, that end with what they found.

A campaign is a file: `python -m campaigns.NAME --count N --seed S`. It prints a JSON object, and ends with status 1
where it found anything.
"""
