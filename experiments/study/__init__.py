"""What the experiments share: the command line, records that are made once, tables and plots of lines."""
