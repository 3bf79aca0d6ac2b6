"""The ladder: an ablation that measures one update with every memory knob off, then with one more knob on in each row."""
