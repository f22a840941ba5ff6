"""`python -m hetplan`, which is also how torchrun starts `hetplan profile`."""

from hetplan.cli.main import main

if __name__ == "__main__":
    main()
