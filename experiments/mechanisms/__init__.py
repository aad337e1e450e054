"""Every mechanism of the library's table, compared.

python -m experiments.mechanisms.recall --size smoke|cpu
python -m experiments.mechanisms.synthetic --task selective-copying|induction --size smoke|cpu
"""
