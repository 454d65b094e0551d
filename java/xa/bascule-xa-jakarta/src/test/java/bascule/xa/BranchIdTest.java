package bascule.xa;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;

import org.junit.jupiter.api.Test;

class BranchIdTest {
    @Test
    void listedBranchHasTheBytesOfTheLine() {
        BranchId branch = BranchId.listed("prepared 1790000000000 131077:00ff7f80:");
        assertEquals(131077, branch.getFormatId());
        assertArrayEquals(new byte[] {0, -1, 127, -128}, branch.getGlobalTransactionId());
        assertArrayEquals(new byte[0], branch.getBranchQualifier());
        assertEquals("131077:00ff7f80:", branch.toString());
    }

    @Test
    void branchesAreEqualIfAllThreePartsAre() {
        BranchId branch = BranchId.listed("prepared 1 7:67:62");
        assertEquals(branch, BranchId.of(branch));
        assertEquals(branch.hashCode(), BranchId.of(branch).hashCode());
        for (String other : new String[] {"8:67:62", "7:68:62", "7:67:63", "7:6762:"}) {
            assertNotEquals(branch, BranchId.listed("prepared 1 " + other));
        }
    }
}
