"""What programs of several ops share."""
