"""hetplan as people use libraries: values in, values out, pictures in notebooks."""
