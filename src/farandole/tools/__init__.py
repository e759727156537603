# Programs that come with the package.
# Each may touch anything but the frameworks.
