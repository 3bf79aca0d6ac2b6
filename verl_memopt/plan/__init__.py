"""What fits on a card, and what would make a run fit: from settings and sizes of models alone, without weights or a device.

From the answer down to its parts: ``report`` prints what ``verl-memopt fit`` found. ``search`` finds it, over the ``levers`` that
a run may set. ``verdict`` compares a run with a card: ``peaks`` are its bytes in each phase, ``held`` those of one model,
``formulas`` those of a block and its attention. ``seconds`` estimates the time of a step, by rates that ``calibrate`` measures.
``advice`` is the
error of a run that ran out of memory, ``until_it_fits`` starts it again with what the error advises, and ``list_knobs`` lists all
knobs.
"""
