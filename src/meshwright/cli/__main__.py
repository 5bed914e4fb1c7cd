"""``python -m meshwright.cli``: the entry point for ``torchrun -m``."""

from meshwright.cli import main

if __name__ == "__main__":
    main()
