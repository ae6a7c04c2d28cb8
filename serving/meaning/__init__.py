"""When an answer to one question may be given to another: guards over the words, the semantic bucket, the edit distance."""
