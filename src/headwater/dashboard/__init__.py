"""``headwater ui``: a local web page over run directories. It only reads them, and uses their files alone."""
