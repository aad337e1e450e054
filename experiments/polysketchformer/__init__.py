"""PolySketchFormer (section 3.1, table 4): the ablation of the lower-triangular multiplication.

python -m experiments.polysketchformer.cumulative_sums --size smoke|cpu
"""
