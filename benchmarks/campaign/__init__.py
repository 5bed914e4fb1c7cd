"""The campaign: faults of many kinds, one after the other, and what must hold after each. See ``__main__.py``.

warm.py       starts commands at once, in boxes, with limits; knows which processes are left
site.py       a place for one fault: a run, its commands, the moment of the fault, what was promised
checks.py     what must hold afterwards, as pure functions of files and texts
processes.py  network.py  disk.py  damage.py  machine.py  mistakes.py      the kinds of faults
kinds.py      all kinds by name
journal.py    one line a fault, so that a campaign that was stopped goes on
"""
