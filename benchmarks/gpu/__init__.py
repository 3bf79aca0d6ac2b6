"""What is measured on a GPU machine, and scripts for it; all of it runs on a CPU too, on small shapes."""
