"""``python -m specheads`` is the same as ``specheads`` (and what ``accelerate launch -m specheads`` starts)."""

from specheads.cli import main

if __name__ == "__main__":
    main()
