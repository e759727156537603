# Internal names of Horovod that other programs import and that need code: thin adapters over farandole.launch.
# Touches nothing by itself.
"""`src/horovod` imports these modules. Names that are only aliases are in its table."""
