"""RLT: a teacher explains known solutions, and a frozen student scores how well each explanation leads to its solution."""
