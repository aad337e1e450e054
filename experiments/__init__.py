"""Experiments: one folder per paper or stage, one file per table or figure; what they share is in study/.

Records and plots are in results/.
"""
