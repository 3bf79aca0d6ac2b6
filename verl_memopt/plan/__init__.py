"""Find out whether a run fits on a card, and what would make it fit, without weights and without a device.

Only the settings of the run and the sizes of its models are read. From the answer down to its parts:

- ``report`` prints what ``verl-memopt fit`` finds, and ``search`` finds it by trying the ``levers``, the settings that may
  change.
- ``verdict`` compares a run with a card. ``peaks`` has the bytes of each phase, ``held`` the bytes of one model, and ``formulas``
  the bytes of one decoder block.
- ``seconds`` estimates the time of a step, with rates that ``calibrate`` measures.
- ``advice`` writes the error of a run that runs out of memory, and ``until_it_fits`` starts the run again with that advice.
- ``list_knobs`` prints all knobs.
"""
