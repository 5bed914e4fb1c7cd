"""``python -m meshwright.cli``, in the form that ``torchrun -m`` can start."""

from meshwright.cli import main

if __name__ == "__main__":
    main()
