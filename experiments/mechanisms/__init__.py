"""Every mechanism of the library's table, compared.

python -m experiments.mechanisms.recall --size smoke|cpu
"""
