"""The first measurements of the library: language modelling on books, and recall from beyond the local chunk.

python -m experiments.foundation.books --size smoke|cpu
python -m experiments.foundation.recall --size smoke|cpu
"""
