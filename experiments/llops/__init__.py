"""LLOPS (table 3): how near feature maps come to (q . k)^p; beside it the error measures of the other papers.

python -m experiments.llops.approximation --size smoke|cpu
"""
