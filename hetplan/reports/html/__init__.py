"""The report: values of results (`values`), pictures of them (`charts`), one HTML page (`page`)."""
