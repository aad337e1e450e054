"""Experiments: one folder per paper or stage, one file per table or figure. Results and their plots are in results/."""
