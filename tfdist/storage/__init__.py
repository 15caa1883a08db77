"""Files on local disks, on TensorFlow's file systems and in object stores, by path or URL."""
