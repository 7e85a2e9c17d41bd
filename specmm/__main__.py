"""``python -m specmm``: the command ``specmm``."""

from specmm.cli import main

if __name__ == "__main__":
    main()
