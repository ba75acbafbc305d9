"""`python3 -m cli`: the command line from the tree, without an installation."""

from cli.main import main

if __name__ == "__main__":
    main()
