"""What each verb of the command line does, from a recipe or a checkpoint to files and numbers."""
