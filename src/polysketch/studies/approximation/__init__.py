"""How near feature maps come to (q . k)^p, and mechanisms to what they approximate."""
