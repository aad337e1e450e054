"""What makes a sketched mechanism learn: forms of the exact part, of the far part, and of what joins them.

python -m experiments.learning.forms_compared --size smoke|quick|cpu|gpu
python -m experiments.learning.lengths --runs OUT/SIZE of forms_compared
python -m experiments.learning.needle --runs OUT/SIZE of forms_compared
"""
