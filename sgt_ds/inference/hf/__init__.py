"""The model file that exports carry. Imported here only to build, check and run an export."""
