"""Workers: the roles on devices, and the groups of processes that hold them."""
