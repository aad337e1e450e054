"""What makes a sketched mechanism learn: forms of the exact part, of the far part, and of what joins them."""
