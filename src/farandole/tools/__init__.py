# Command line tools of the package.
# Each may touch anything except the frameworks.
