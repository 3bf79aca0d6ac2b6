"""The ladder: one update of a model, measured with every knob off and then with one knob more at a time."""
