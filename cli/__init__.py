"""The command line `flashbob-curv`: it reads options, calls the library, and shows and stores what comes back."""
