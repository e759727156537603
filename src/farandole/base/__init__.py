# The base of the package: errors, settings, versions, and the report of a failed rank.
# The room's files touch one another and nothing else of the package.
