"""HyperAttention (arXiv:2310.05869, figure 3): a trained softmax model whose last layers are replaced.

python -m experiments.hyperattention.patching MODEL --data DATA --size smoke|cpu|paper
"""
